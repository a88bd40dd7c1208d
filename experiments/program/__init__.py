"""What every program has: a config, a command line, a bar of progress, files, and an end.

Read `config.py` first: it lists the fields of a run, with their meaning. `command.py` starts a
program and lets its command line change those fields; `options.py` knows those that a model, or
data of one's own, have beside them. `ending.py` says what a signal or an error does to a program,
`progress.py` shows how far it is, and `files.py` writes files whole or not at all.
"""
