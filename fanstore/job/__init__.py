"""The daemons of a job: start, agreement, one node's parts put together, accounts, the end."""
