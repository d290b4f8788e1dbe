"""What a person reads after a run: one table, transcripts and learning curves."""
