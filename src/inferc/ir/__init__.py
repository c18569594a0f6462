"""The IR of every stage: programs, their lazy weights, their ops and the references of these."""
