"""What all servers offer, as one snapshot, and the few tools of it that a request needs."""
