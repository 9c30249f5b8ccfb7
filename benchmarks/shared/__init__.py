"""Parts that several cases share: cells, peers, reports, child processes, searches, random shapes, committed trials."""
