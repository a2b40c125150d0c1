"""Programs written by a model, and signals to them."""

from __future__ import annotations

from colograd.extensions.evaluation.judging import run_python


def test_a_terminated_model_program_runs_again() -> None:
    first = (
        "import os, signal\nif not os.path.exists('x'):\n    open('x', 'w')\n    os.kill(os.getpid(), signal.SIGTERM)"
    )
    assert run_python(first, 60)
    assert not run_python("import os, signal\nos.kill(os.getpid(), signal.SIGTERM)", 60)
