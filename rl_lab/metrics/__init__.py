"""What a run says about itself: numbers gathered without a device sync, written to files and to the terminal.

names      the table of every metric name, its unit and what a healthy value looks like
logger     the window of numbers between two log rows
writers    where rows go: metrics.jsonl, TensorBoard, nowhere
terminal   where a run is shown to a person: view (what is known), pace (how fast), panel, plain, notebook, relay
system     CPU, memory and GPU use
time_split where the wall-clock goes
"""
