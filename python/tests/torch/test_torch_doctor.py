"""`python -m vramp doctor` on a machine with a driver: what is wrong is named, and the exit code is 1."""

import os
import subprocess
import sys

import pytest


def doctor(**variables):
    """Its exit code and its lines."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("VRAMP_")}
    done = subprocess.run(
        [sys.executable, "-m", "vramp", "doctor"],
        env=environment | variables,
        capture_output=True,
        text=True,
        timeout=120,
    )
    return done.returncode, done.stdout


def test_a_machine_that_works_is_described():
    code, text = doctor()
    assert code == 0, text
    assert "ok   device           cuda:0" in text
    assert "ok   torch            " in text
    assert "ok   vramp.torch.enable()" in text
    assert "ok   sharing          other processes: by descriptors" in text


@pytest.mark.parametrize(
    ("variable", "value", "line"),
    [
        ("VRAMP_DEVICE", "gpu", "FAIL pool             VRAMP_DEVICE=gpu is invalid: use cuda, sim or sim:CARD"),
        ("VRAMP_CONF", "limit=80", "FAIL pool             VRAMP_CONF is invalid: the limit is below 2 MiB"),
        ("CUDA_VISIBLE_DEVICES", "77", "FAIL visible devices  CUDA_VISIBLE_DEVICES=77 names no card of this machine"),
    ],
)
def test_a_wrong_setting_is_named(variable, value, line):
    code, text = doctor(**{variable: value})
    assert code == 1, text
    assert line in text


def test_hidden_cards_leave_the_simulator_which_is_said():
    code, text = doctor(CUDA_VISIBLE_DEVICES="")
    assert code == 3, text
    assert "CUDA_VISIBLE_DEVICES= hides every card" in text
