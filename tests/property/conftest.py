"""After faults were tried, how many each judge noticed."""

JUDGES = {
    "test_the_machine_notices": "the law machine",
    "test_the_audit_notices": "the audit",
}


def pytest_terminal_summary(terminalreporter) -> None:
    from property.faults import FAULTS

    passed = [report.nodeid for report in terminalreporter.stats.get("passed", ())]
    for test, judge in JUDGES.items():
        noticed = sum(f"::{test}[" in node for node in passed)
        if noticed:
            terminalreporter.write_line(f"{judge} noticed {noticed} of {len(FAULTS)} faults")
