"""Pipeline schedules as data: what runs when, which instructions follow, and proofs about them; no JAX, no devices."""
