from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from covey.checkpoint.manifest import read_manifest, render_manifest
from covey.checkpoint.read import find_latest, read_states, verify
from covey.config.checkpoints import list_checkpoints
from covey.errors import CheckpointError

Make = Callable[..., Path]
FILES = ("config.json", "model.safetensors", "trainer/state.json", "trainer/rng/0.safetensors")


def test_a_whole_checkpoint_verifies(make_checkpoint: Make) -> None:
    checkpoint = make_checkpoint(40)
    manifest = verify(checkpoint)
    assert manifest.size == sum(p.stat().st_size for p in checkpoint.rglob("*") if p.is_file()) - (
        (checkpoint / "manifest.json").stat().st_size
    )
    assert set(read_states(checkpoint, verified=manifest)) == {"cursor", "optimizer", "rng/0"}


@pytest.mark.parametrize("name", FILES)
def test_one_flipped_bit_is_refused_by_name(make_checkpoint: Make, name: str) -> None:
    checkpoint = make_checkpoint(40)
    path = checkpoint / name
    whole = path.read_bytes()
    for position in (0, len(whole) // 2, len(whole) - 1):
        for bit in (0, 7):
            damaged = bytearray(whole)
            damaged[position] ^= 1 << bit
            path.write_bytes(damaged)
            with pytest.raises(CheckpointError, match=f"{name} has the SHA-256"):
                verify(checkpoint)
    path.write_bytes(whole)
    verify(checkpoint)


def test_every_bit_of_the_manifest_counts(make_checkpoint: Make) -> None:
    checkpoint = make_checkpoint(40)
    path = checkpoint / "manifest.json"
    whole = path.read_bytes()
    for position in range(len(whole)):
        damaged = bytearray(whole)
        damaged[position] ^= 1 << (position % 7)
        path.write_bytes(damaged)
        with pytest.raises(CheckpointError, match=r"manifest\.json"):
            verify(checkpoint)


@pytest.mark.parametrize("name", FILES)
def test_a_shortened_and_a_missing_file_are_refused_by_name(make_checkpoint: Make, name: str) -> None:
    checkpoint = make_checkpoint(40)
    path = checkpoint / name
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(CheckpointError, match=f"{name} has .* bytes, but its manifest says"):
        verify(checkpoint)
    path.unlink()
    with pytest.raises(CheckpointError, match=f"{name} is missing"):
        verify(checkpoint)


def test_a_surplus_file_and_a_link_are_refused_by_name(make_checkpoint: Make) -> None:
    checkpoint = make_checkpoint(40)
    extra = checkpoint / "trainer" / "extra.bin"
    extra.write_bytes(b"")
    with pytest.raises(CheckpointError, match=r"trainer/extra\.bin is not listed in its manifest"):
        verify(checkpoint)
    extra.unlink()
    model = checkpoint / "model.safetensors"
    model.rename(checkpoint.parent / "elsewhere")
    model.symlink_to(checkpoint.parent / "elsewhere")
    with pytest.raises(CheckpointError, match=r"model\.safetensors is a link"):
        verify(checkpoint)


def test_all_faults_come_together(make_checkpoint: Make) -> None:
    checkpoint = make_checkpoint(40)
    (checkpoint / "config.json").unlink()
    (checkpoint / "extra").write_bytes(b"x")
    with pytest.raises(CheckpointError, match=r"config\.json is missing; extra is not"):
        verify(checkpoint)


def test_a_directory_without_manifest_is_no_checkpoint(make_checkpoint: Make, tmp_path: Path) -> None:
    checkpoint = make_checkpoint(40)
    (checkpoint / "manifest.json").unlink()
    for path in (checkpoint, tmp_path / "absent"):
        with pytest.raises(CheckpointError, match="is not a complete checkpoint"):
            verify(path)


def test_a_renamed_step_and_a_foreign_format_are_refused(make_checkpoint: Make, tmp_path: Path) -> None:
    checkpoint = make_checkpoint(40)
    with pytest.raises(CheckpointError, match="of step 40"):
        verify(checkpoint.rename(tmp_path / "checkpoint-41"))
    best = (tmp_path / "checkpoint-41").rename(tmp_path / "best")
    assert verify(best).step == 40
    manifest = best / "manifest.json"
    manifest.write_text(json.dumps(json.loads(manifest.read_text()) | {"format": 3}))
    with pytest.raises(CheckpointError, match="format 3"):
        verify(best)


def test_a_run_does_not_go_on_from_an_older_format(make_checkpoint: Make, tmp_path: Path) -> None:
    """Its files verify, and its model is one as ever."""
    checkpoint = make_checkpoint(40)
    older = replace(read_manifest(checkpoint), format=1)
    (checkpoint / "manifest.json").write_text(render_manifest(older))
    assert verify(checkpoint).format == 1
    with pytest.raises(CheckpointError, match=r"checkpoint-40 has format 1.*--model .*checkpoint-40"):
        read_states(checkpoint)
    latest = find_latest(tmp_path, with_trainer=True)
    assert latest.path is None and "has format 1" in latest.skipped[0].reason


def test_states_are_not_read_from_damaged_files(make_checkpoint: Make) -> None:
    checkpoint = make_checkpoint(40)
    path = checkpoint / "trainer" / "optimizer.safetensors"
    damaged = bytearray(path.read_bytes())
    damaged[-1] ^= 1
    path.write_bytes(damaged)
    with pytest.raises(CheckpointError, match=r"optimizer\.safetensors"):
        read_states(checkpoint)


def test_the_newest_is_by_number_and_damaged_ones_are_reported(make_checkpoint: Make, tmp_path: Path) -> None:
    for step in (9, 10, 100):
        make_checkpoint(step)
    make_checkpoint(11, trainer=False)
    for name in ("checkpoint-final", ".tmp-checkpoint-200-aa", "checkpoint-0100"):
        (tmp_path / name).mkdir()
    assert [p.name for p in list_checkpoints(tmp_path)] == [f"checkpoint-{s}" for s in (9, 10, 11, 100)]
    assert find_latest(tmp_path).path == tmp_path / "checkpoint-100"
    (tmp_path / "checkpoint-100" / "manifest.json").unlink()
    latest = find_latest(tmp_path)
    assert latest.path == tmp_path / "checkpoint-11" and latest.manifest is not None
    assert [(s.path.name, "not a complete" in s.reason) for s in latest.skipped] == [("checkpoint-100", True)]
    resumable = find_latest(tmp_path, with_trainer=True)
    assert resumable.path == tmp_path / "checkpoint-10"
    assert [s.path.name for s in resumable.skipped] == ["checkpoint-100", "checkpoint-11"]


def test_nothing_there_is_no_error(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "absent"):
        latest = find_latest(path)
        assert (latest.path, latest.manifest, latest.skipped) == (None, None, ())


def test_verifying_needs_no_torch(make_checkpoint: Make) -> None:
    program = (
        "import sys; from pathlib import Path; from covey.checkpoint.read import verify\n"
        "import covey.checkpoint.retain\n"
        "verify(Path(sys.argv[1])); sys.exit('torch' in sys.modules or 'safetensors' in sys.modules)"
    )
    assert (
        subprocess.run([sys.executable, "-c", program, str(make_checkpoint(1))], check=False).returncode == 0
    )
