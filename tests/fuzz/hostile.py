"""Hostile values and lines for files of settings and states of checkpoints."""

from typing import Any

__all__ = ["HOSTILE", "LINES"]

# Values that parsers, importers, sizes and terminals trip over. OUTSIDE is replaced by a directory.
HOSTILE: tuple[Any, ...] = (
    None, True, False, 0, -1, 1, 7, 2**31, 2**63, 10**30, 0.5, -0.5, 1e-320, 1e308, float("nan"), float("inf"),
    "", "x", "1", "nan",
    "em", "canary", "canary.Net", "canary.Data", "run.canary.Net", "os.system", "torchcaps.training.os.system",
    "torchcaps.routing.base.re.compile", "torchcaps.routing.EM", "builtins.eval", "${HOME}",
    "${oc.env:HOME}", "%(HOME)s",
    "!!python/name:canary.Net", "__import__('canary')", "\x1b[2J\x07", "\u202e", "\x00", "a" * 100_000, "../../outside",
    "OUTSIDE", "OUTSIDE/deep/er", "~", "/", "/dev/zero", "http://127.0.0.1:1/x", "file:///etc/passwd",
    "@canary", "s3://b/x",
    [], {}, [1, 2], [[[[]]]], [None], ["canary.Net"], {"class_path": "canary.Routing"},
    {"class_path": "canary.Routing", "init_args": {}},
    {"class_path": "torchcaps.routing.EM", "init_args": {"iterations": 10**9}}, {"class_path": "torchcaps.routing.EM"},
    {"class_path": "torchcaps.models.schedules.Product", "init_args": {"first": {"class_path": "canary.Net"}}},
    {"class_path": ["canary.Net"]}, {"__path__": "canary.py"}, {"config": "canary.yaml"}, {"__class__": "canary.Net"},
    {"name": "canary.Net"}, {"a": {"b": {"c": {}}}}, '{"class_path": "canary.Routing"}', "[1, 2", "{", "1e400",
    "0x10", "1_000",
)  # fmt: skip
LINES = (
    "a: !!python/object/apply:os.system ['touch executed']",
    "model: !!python/name:canary.Net",
    "a: !!python/module:canary",
    "a: !canary.Net {}",
    "a: !include /etc/passwd",
    "<<: *missing",
    "a: &a [*a, *a]",
    "? {a: b}\n: c",
    "lr_schedule: {class_path: canary.Net}",
    "routing: canary.Routing",
    "trust_remote_code: true",
    "config: canary.yaml",
    "__path__: canary.py",
    "a: 2020-99-99",
    "--- \nmodel: canary.Net",
    "%YAML 9.9",
    "resume: run",
    "out: OUTSIDE/run",
    "\t",
    "a: " + "[" * 2000,
    "\n".join(["a0: &a0 {k: 1}", *(f"a{i}: &a{i} {{<<: [{', '.join([f'*a{i - 1}'] * 9)}]}}" for i in range(1, 20))]),
    "seed: " + "1:" * 300_000 + "1",
)
