"""All cases."""

import cases_attributes
import cases_branches
import cases_containers
import cases_effects
import cases_functions
import cases_inputs
import cases_lookups
import cases_modules
import cases_python
import cases_torch_state
import cases_traps
import cases_values

FAMILIES = (
    cases_attributes.FAMILY,
    cases_lookups.FAMILY,
    cases_functions.FAMILY,
    cases_containers.FAMILY,
    cases_modules.FAMILY,
    cases_torch_state.FAMILY,
    cases_inputs.FAMILY,
    cases_values.FAMILY,
    cases_branches.FAMILY,
    cases_effects.FAMILY,
    cases_python.FAMILY,
    cases_traps.FAMILY,
)
CASES = tuple(case for family in FAMILIES for case in family)
