"""The web page: a planner, and a live view of runs (`dpftrl web`).

The page computes nothing of its own: its numbers come from `dpftrl.plan`, `dpftrl.status`,
`dpftrl.statement` and `dpftrl.verify`, as those of the command line do. It needs the extra `web`.
"""
