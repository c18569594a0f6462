"""What a step is made of: plans, sequences, sampling parameters, costs. numpy only."""
