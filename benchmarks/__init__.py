"""What things cost, beside what they are to be judged by, in one run. Figures for people, never tests."""
