"""Python runs this at its start where this folder is on PYTHONPATH: in runs of tests.evidence.controller alone."""

import os

if os.environ.get("EVENKEEL_TEST_LAYER_FAULT"):
    import layer_fault

    layer_fault.install()
