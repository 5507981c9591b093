"""The mixture of experts: routing, dispatch into slots, experts, combination, and the balance of their loads."""
