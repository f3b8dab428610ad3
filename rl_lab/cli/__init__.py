"""The command line: argument parsing and printing only, one file per command.

Nothing here imports torch, numpy or Hydra at module level, so that `rl-lab --help` answers at once;
each command imports what it needs when it runs.
"""
