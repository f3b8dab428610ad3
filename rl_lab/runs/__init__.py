"""Everything a run leaves on disk: its directory, lock, checkpoints, manifest, index, report and videos.

run_directory   the paths of one run, its config, status and tags
lock            one writer at a time, released by the kernel when the process dies
checkpoint      atomic, checksummed checkpoints and the walk back past damaged ones
state           one save loop and one load loop over every stateful object, with a readable diff
manifest        what made this run (versions, commit, command, machine); git, lineage; migrate upgrades old configs
index           the searchable SQLite index, rebuilt from the directories at any time; query reads conditions
compare         groups of seeds: scores with intervals (statistics), curves (series), tables, published curves
tags            what people write on runs; cleanup frees disk space
report          report.md with the learning curve; video writes mp4 files
"""
