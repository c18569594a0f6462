"""The intermediate representation (IR) of every compile stage: programs, lazy weights, ops and their references."""
