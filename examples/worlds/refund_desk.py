"""A refund desk in the manner of tau-bench: tools on a database, a simulated user, graded by the final state.

The user says what they want bit by bit, each time the agent calls ``submit``. The policy that the agent is told is
part of the grade: a refund before the user said yes, or any other change, scores 0.
"""

from __future__ import annotations

import random

from turnstile_server.worlds import World, WorldTask, tool

POLICY = """You work at the refund desk of a shop and talk to a user. Call the tool submit with each of your
messages: its result is the user's reply. Ask the user to confirm (yes) before you refund anything, and refund only
what they ask for. When the conversation is over, you are done.

The user begins: Hello, I want to give something back."""
ITEMS = ("lamp", "kettle", "radio", "clock", "globe")


class RefundDesk(World):
    """Talk to a user who wants to give something back, and refund the right order."""

    @classmethod
    def tasks(cls) -> list[WorldTask]:
        return [WorldTask(f"refund-{seed}", seed=seed) for seed in range(3)]

    def reset(self, seed: int) -> str:
        draw = random.Random(seed)
        ids = draw.sample(range(1000, 9999), len(ITEMS))
        self.orders = {
            f"W{order}": {"item": item, "status": "paid"} for order, item in zip(ids, ITEMS, strict=True)
        }
        self.wanted = draw.choice(list(self.orders))
        self.said = [f"It is the {self.orders[self.wanted]['item']}.", "Yes, please refund it.", None]
        self.confirmed_first = True
        return POLICY

    @tool
    def list_orders(self) -> list[dict[str, str]]:
        """List the user's orders: id, item, status."""
        return [{"id": order, **fields} for order, fields in self.orders.items()]

    @tool
    def refund(self, order_id: str) -> str:
        """Refund an order. This cannot be undone."""
        if order_id not in self.orders:
            return f"There is no order {order_id}."
        self.confirmed_first = self.confirmed_first and len(self.said) == 1
        self.orders[order_id]["status"] = "refunded"
        return f"Order {order_id} is refunded."

    def respond(self, answer: str) -> str | None:
        return self.said.pop(0) if self.said else None

    def grade(self) -> dict[str, float]:
        refunded = [order for order, fields in self.orders.items() if fields["status"] == "refunded"]
        return {"state": refunded == [self.wanted], "policy": self.confirmed_first}

    def solve(self) -> None:
        self.respond("What do you want to give back?")
        self.respond("Shall I refund it?")
        self.refund(self.wanted)
        self.respond("It is refunded.")
