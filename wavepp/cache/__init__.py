"""What one stage retains, evicts, leases and reserves; `store.StageCache` is the only door."""
