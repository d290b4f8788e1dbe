"""What policy-gradient algorithms share: on-policy batches, advantages, clipped losses."""
