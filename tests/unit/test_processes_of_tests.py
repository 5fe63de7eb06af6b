"""What runs a file of the tests in processes of its own sees one that fails, that hangs or that is killed."""

from __future__ import annotations

import os

import pytest

from support.processes import run_in_processes

FAILS = "import sys; print('said before'); sys.exit(3)"
ONE_FAILS = "import os, time\nif os.environ['RANK'] == '1':\n    raise SystemExit(4)\ntime.sleep(600)"
ENDS_ITSELF = "import os, signal; os.kill(os.getpid(), signal.SIGSEGV)"


@pytest.mark.parametrize(
    ("program", "processes", "timeout", "seen"),
    [
        (FAILS, 1, 60, r"exit codes \[3\]\nsaid before"),
        ("1 / 0", 1, 60, r"exit codes \[1\]\n(.|\n)*ZeroDivisionError"),
        (ONE_FAILS, 2, 60, r"exit codes \[-9, 4\]"),
        ("import time; time.sleep(600)", 1, 0.5, r"exit codes \[-9\]"),
        (ENDS_ITSELF, 1, 60, r"exit codes \[-11\]"),
    ],
)
def test_a_failure_is_seen(program, processes, timeout, seen, tmp_path):
    file = tmp_path / "program.py"
    file.write_text(program)
    with pytest.raises(AssertionError, match=seen):
        run_in_processes(str(file), processes=processes, timeout=timeout)


def test_a_program_has_its_arguments_its_folder_and_one_thread(tmp_path):
    (tmp_path / "program.py").write_text(
        "import os, pathlib, sys, torch\n"
        "pathlib.Path(sys.argv[1]).write_text(os.environ['WHO'] + f' {torch.get_num_threads()}')\n"
    )
    run_in_processes(
        str(tmp_path / "program.py"), "said", processes=1, environment={"WHO": "me"}, folder=tmp_path
    )
    assert (tmp_path / "said").read_text() == "me 1"
    assert "WHO" not in os.environ
