"""All cases."""

from unit.channels import (
    cases_attributes,
    cases_branches,
    cases_containers,
    cases_effects,
    cases_functions,
    cases_inputs,
    cases_lookups,
    cases_modules,
    cases_python,
    cases_torch_state,
    cases_traps,
    cases_values,
)

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
