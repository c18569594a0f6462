"""The parts of a step: plans, sequences, sampling parameters and cost models, in numpy only."""
