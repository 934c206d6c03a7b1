"""What controller and agent both speak: errors, events, requests, the specification of a host."""
