"""What a job looks like to people and to other programs: pure functions from figures to text, and its writing."""
