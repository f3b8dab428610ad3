"""`rl-lab export-policy`: a run's policy as one file that acts without RL Lab."""

from __future__ import annotations

import argparse
from pathlib import Path

from rl_lab.cli.parsing import Parser, add_quiet, add_run, add_trust, chosen
from rl_lab.cli.printing import format_value

DESCRIPTION = """Write a run's policy as one file: networks, normalisers, the mapping to the environment's own actions,
and the recurrent state as inputs and outputs. It acts with torch alone (.pt2, read by torch.export.load) or with
onnxruntime alone (.onnx); neither RL Lab nor the environment is needed. The file acts deterministically, for any number
of environments at once. It is compared with the policy before it is kept."""

EXAMPLES = """
rl-lab export-policy @last
rl-lab export-policy @best --format onnx --output cartpole.onnx      needs pip install 'rl-lab[export]'
"""

USE = {
    "torch": 'torch.export.load("{name}").module()({{{inputs}}})["action"]',
    "onnx": 'onnxruntime.InferenceSession("{name}").run(["action"], {{{inputs}}})[0]',
}


def build_parser(prog: str) -> Parser:
    parser = Parser(prog, description=DESCRIPTION, examples=EXAMPLES)
    add_run(parser)
    parser.add_argument("--format", choices=("torch", "onnx"), help="default: what --output ends with, or torch")
    parser.add_argument("--output", type=Path, metavar="FILE", help="default: policy.pt2 or policy.onnx in the run")
    parser.add_argument("--checkpoint", default="latest", metavar="best|latest|PATH", help="which (default: latest)")
    add_trust(parser)
    add_quiet(parser)
    return parser


def run(arguments: argparse.Namespace) -> int:
    from rl_lab import api

    written = api.export_policy(
        arguments.run, **chosen(arguments, "format", "output", "checkpoint", "runs_dir", "trust")
    )
    if not arguments.quiet:
        checked = written.agreement
        inputs = ", ".join(f'"{name}": ...' for name in written.about["inputs"])
        print(f"policy: {format_value(written.path)} ({written.format}, {written.size_bytes / 1000:,.0f} kB)")
        print(
            f"check: the same actions as the policy's for {checked.observations} random observations "
            f"(largest difference {checked.largest_difference:.1g})"
        )
        for note in written.notes:
            print(f"note: {note}")
        print(f"use it: {USE[written.format].format(name=written.path.name, inputs=inputs)}")
        print("more: docs/export.md; the file itself says its inputs, outputs and action space (policy.json)")
    return 0
