"""The devices and the processes of a run.

`hosts.py` finds them and places arrays on them: one device, or a mesh over many hosts. `watch.py`
ends all processes of a run when one is lost. `memory.py` reads what a device's allocator reports.
"""
