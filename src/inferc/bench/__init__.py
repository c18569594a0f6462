"""The load generator behind `inferc bench serve` and `inferc bench tune`: it measures what clients of a server see.

workload.py plans which requests are sent and when, endpoints.py describes the server that receives them, load.py sends
them, figures.py computes the metrics, report.py and plot.py present the results.
"""
