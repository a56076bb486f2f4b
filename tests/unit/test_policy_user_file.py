"""A user's policy is one file: the documented example runs, and each way to get it wrong names the hook."""

import re
from pathlib import Path

import pytest

from tiercache.errors import PolicyError
from tiercache.policies.simulate import Tier, run_tier
from tiercache.policies.traces import make_trace

DOCS = Path(__file__).parents[2] / "docs" / "policies.md"
EXAMPLE = re.search(r"```python\n(.*?)```", DOCS.read_text(), re.DOTALL)[1]
TRACE = make_trace([0, 1, 2, 0, 1, 2, 3, 0])


def write(folder, name, *changes):
    text = EXAMPLE
    for old, new in changes:
        assert old in text
        text = text.replace(old, new)
    path = folder / f"{name}.py"
    path.write_text(text)
    return str(path)


def play(path):
    return run_tier(TRACE, Tier(capacity_bytes=2, policy=path))


def test_the_documented_example_runs(tmp_path):
    hits = play(write(tmp_path, "mru")).hits
    assert hits.tolist() == [False, False, False, True, False, True, False, False]


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("missing", ("def victim(", "def other("), "hook victim is missing"),
        (
            "parameters",
            ("def on_hit(R, M, F, k, now)", "def on_hit(R, k)"),
            "hook on_hit has the wrong parameters",
        ),
        ("no_python", ("def victim(", "def victim(("), "the file does not run: SyntaxError"),
        ("no_types", ("    return k\n", "    return R.nothing\n"), "hook victim does not compile"),
        (
            "nobody",
            ("    return k\n", "    return -1\n"),
            "hook victim returned -1 though pages can be evicted",
        ),
        ("stranger", ("    return k\n", "    return 3 - k + k\n"), "hook victim returned 3"),
        ("outside", ("    return k\n", "    return M[10**6]\n"), "hook victim reads or writes outside"),
        (
            "books",
            ("    unlink(R, M, k)\n    push", "    R[k].size += 1\n    unlink(R, M, k)\n    push"),
            "USED",
        ),
    ],
)
@pytest.mark.long
def test_every_mistake_names_the_hook(tmp_path, name, change, message):
    with pytest.raises(PolicyError, match=message):
        play(write(tmp_path, name, change))


def test_a_missing_hook_and_a_wrong_signature_need_no_compiler(tmp_path):
    with pytest.raises(PolicyError, match="hook victim is missing"):
        play(write(tmp_path, "without", ("def victim(", "def other(")))
    with pytest.raises(PolicyError, match="hook on_hit has the wrong parameters"):
        play(write(tmp_path, "arguments", ("def on_hit(R, M, F, k, now)", "def on_hit(R, k)")))
