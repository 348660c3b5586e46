"""Mail that is pushed to subscriptions: the service's side of what a gateway opens (E6, E7, E8)."""
