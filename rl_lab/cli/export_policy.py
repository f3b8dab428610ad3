"""Write a run's policy as one file: networks, normalisers, the mapping to the environment's own actions, and the
recurrent state as inputs and outputs. It acts with torch alone (.pt2, read by torch.export.load) or with onnxruntime
alone (.onnx); neither RL Lab nor the environment is needed. The file acts deterministically, for any number of
environments at once. It is compared with the policy before it is kept.

examples:
  rl-lab export-policy @last
  rl-lab export-policy @best --format onnx --output cartpole.onnx      needs pip install 'rl-lab[export]'
"""

from __future__ import annotations

import argparse
from pathlib import Path

from rl_lab.cli.parsing import CHECKPOINT, RUN, TRUST, argument, chosen, quiet
from rl_lab.cli.printing import format_value

ARGUMENTS = (
    *RUN,
    argument("--format", choices=("torch", "onnx"), help="default: what --output ends with, or torch"),
    argument("--output", type=Path, metavar="FILE", help="default: policy.pt2 or policy.onnx in the run"),
    CHECKPOINT,
    TRUST,
    quiet(),
)
USE = {
    "torch": 'torch.export.load("{name}").module()({{{inputs}}})["action"]',
    "onnx": 'onnxruntime.InferenceSession("{name}").run(["action"], {{{inputs}}})[0]',
}


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
