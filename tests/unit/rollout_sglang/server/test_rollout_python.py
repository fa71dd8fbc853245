"""Engines in another Python: one that has SGLang (here a double of it) and nothing of ours."""

from __future__ import annotations

import subprocess
import sys
import venv
from pathlib import Path

import pytest

from pipeline.errors import EngineStartError
from rollout_sglang.server.rollout_python import PYTHON_VARIABLE, module_command, module_environment, require_sglang

SGLANG = {
    "__init__.py": "",
    "launch_server.py": """
        import multiprocessing
        def child(queue):
            queue.put(hasattr(__import__("sys").modules["__mp_main__"], "serve"))
        def run_server(arguments):
            context = multiprocessing.get_context("spawn")
            queue = context.Queue()
            process = context.Process(target=child, args=(queue,))
            process.start()
            again = queue.get(timeout=30)
            process.join()
            beside = __import__("importlib.util").util.find_spec("tests")
            print("served", arguments, "module run again in a child:", again, "beside ours:", beside)
    """,
    "srt/__init__.py": "",
    "srt/entrypoints/__init__.py": "",
    "srt/entrypoints/http_server.py": """
        class App:
            def add_middleware(self, kind, **options): print("fenced", end=" ")

        app = App()
    """,
    "srt/plugins/__init__.py": "def load_plugins(): pass",
    "srt/plugins/hook_registry.py": """
        from types import SimpleNamespace

        HookType = SimpleNamespace(BEFORE="before", AFTER="after", AROUND="around")
        HookRegistry = SimpleNamespace(register=lambda *_: None)
    """,
    "srt/server_args.py": "def prepare_server_args(argv): return argv",
    "srt/utils.py": "def kill_process_tree(pid, include_parent): pass",
}


@pytest.fixture(scope="module")
def foreign(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An interpreter whose only package is the double, of release 9.9.9."""
    folder = tmp_path_factory.mktemp("foreign")
    venv.create(folder, with_pip=False, symlinks=True)
    packages = folder / "lib" / f"python{sys.version_info.major}.{sys.version_info.minor}" / "site-packages"
    for name, source in SGLANG.items():
        file = packages / "sglang" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("\n".join(line.removeprefix("        ") for line in source.splitlines()) + "\n")
    info = packages / "sglang-9.9.9.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: sglang\nVersion: 9.9.9\n")
    return folder / "bin" / "python"


def run(command: list[str]) -> str:
    result = subprocess.run(command, env=module_environment(), capture_output=True, text=True, timeout=60, check=False)
    assert result.returncode == 0, result.stderr
    return result.stdout


def test_without_the_variable_it_is_this_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(PYTHON_VARIABLE, raising=False)
    monkeypatch.setenv("PYTHONPATH", "/elsewhere")
    assert module_command("rollout_sglang.server.launch_server") == [
        sys.executable,
        "-P",
        "-m",
        "rollout_sglang.server.launch_server",
    ]
    root, other = module_environment()["PYTHONPATH"].split(":")
    assert (Path(root) / "rollout_sglang").is_dir()
    assert other == "/elsewhere"


def test_a_foreign_interpreter_runs_the_server_with_its_own_packages(
    foreign: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Spawned children find the module again. Neither a package of this interpreter's PYTHONPATH is seen, nor what
    lies beside ours: in an installed wheel, all of the learner's packages."""
    (tmp_path / "sglang.py").write_text("raise SystemExit('the sglang of the wrong interpreter')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setenv(PYTHON_VARIABLE, str(foreign))
    assert require_sglang() == "9.9.9"
    served = run([*module_command("rollout_sglang.server.launch_server"), "--port", "1"])
    assert served == "fenced served ['--port', '1'] module run again in a child: True beside ours: None\n"


def test_what_is_no_python_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv(PYTHON_VARIABLE, str(tmp_path / "missing"))
    with pytest.raises(EngineStartError, match="expected a Python executable; correct or unset it"):
        require_sglang()
    monkeypatch.setenv(PYTHON_VARIABLE, "/bin/false")
    with pytest.raises(EngineStartError, match="does not run as Python"):
        require_sglang()


def test_an_interpreter_without_sglang_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    venv.create(tmp_path / "bare", with_pip=False, symlinks=True)
    python = tmp_path / "bare" / "bin" / "python"
    monkeypatch.setenv(PYTHON_VARIABLE, str(python))
    with pytest.raises(EngineStartError, match=f"{python} has no sglang"):
        require_sglang()
