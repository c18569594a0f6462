"""Load on a real server, and what its clients see: `inferc bench serve` and `inferc bench tune`.

workload.py says what is sent and when, endpoints.py to whom, load.py sends it, figures.py counts, report.py and plot.py show.
"""
