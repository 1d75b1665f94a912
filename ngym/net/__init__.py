"""Networking: authentication, TLS, limits of connections and JSON, retry budgets, and load balancing."""
