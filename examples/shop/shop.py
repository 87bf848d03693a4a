"""A small shop in SQLite: the world of a tool-use task, graded by the state of its database in the end.

Every episode has a database of its own in memory, filled from the episode's seed. The agent has tools and nothing
else: no sandbox, no files. An episode is right when the database is what it would be if exactly the errand had
been run: an order too many, a wrong quantity or a cancelled order that should stand scores 0.

    turnstile tasks validate examples/shop/shop.py
    turnstile serve --tasks examples/shop/shop.py
"""

from __future__ import annotations

import random
import sqlite3
from collections.abc import Callable
from typing import Any

from turnstile_server.worlds import ToolError, World, WorldTask, tool

SCHEMA = """
CREATE TABLE users (id INTEGER PRIMARY KEY, name TEXT UNIQUE, money INTEGER CHECK (money >= 0));
CREATE TABLE products (id INTEGER PRIMARY KEY, name TEXT UNIQUE, price INTEGER, stock INTEGER CHECK (stock >= 0));
CREATE TABLE cart (user INTEGER, product INTEGER, quantity INTEGER CHECK (quantity > 0), PRIMARY KEY (user,
product)); CREATE TABLE orders (id INTEGER PRIMARY KEY, user INTEGER, status TEXT); CREATE TABLE lines (order_id
INTEGER, product INTEGER, quantity INTEGER, price INTEGER);
"""
NAMES = ("Ada", "Bo", "Chen", "Dana", "Eve", "Finn", "Gita", "Hugo")
PRODUCTS = (
    "black tea",
    "green tea",
    "coffee",
    "cocoa",
    "blue mug",
    "red mug",
    "teapot",
    "honey",
    "sugar",
    "biscuits",
)


class Shop(World):
    """Run an errand in a small shop: buy, cancel or exchange, and change nothing else."""

    @classmethod
    def tasks(cls) -> list[WorldTask]:
        return [
            WorldTask(f"shop-{errand}-{seed}", {"errand": errand}, seed, fields={"tags": ["tools", errand]})
            for errand in ERRANDS
            for seed in range(3)
        ]

    def reset(self, seed: int, errand: str) -> str:
        self.seed, self.errand = seed, errand
        self.db = sqlite3.connect(":memory:", isolation_level=None)
        self.db.row_factory = sqlite3.Row
        self.db.executescript(SCHEMA)
        self._fill(random.Random(seed))
        instruct, self._play = ERRANDS[errand](self)
        return (
            f"You serve the customer {self.user['name']} in a shop, with the tools you have. Prices are in cents. "
            f"{instruct} Do nothing else. Then you are done."
        )

    # The agent's tools

    @tool
    def find_products(self, text: str = "") -> list[dict[str, Any]]:
        """Find products whose name contains the text; all of them without it. Gives id, name, price, stock."""
        return self._rows("SELECT * FROM products WHERE name LIKE ? ORDER BY id", f"%{text}%")

    @tool
    def show_customer(self) -> dict[str, Any]:
        """Show the customer's name and money, what is in the cart, and all orders."""
        orders = self._rows("SELECT id, status FROM orders WHERE user = ? ORDER BY id", self.user["id"])
        for order in orders:
            order["lines"] = self._rows(
                "SELECT product, name, quantity, lines.price FROM lines JOIN products ON products.id = product "
                "WHERE order_id = ? ORDER BY product",
                order["id"],
            )
        money = self._value("SELECT money FROM users WHERE id = ?", self.user["id"])
        return {"name": self.user["name"], "money": money, "cart": self._cart(), "orders": orders}

    @tool
    def add_to_cart(self, product_id: int, quantity: int = 1) -> list[dict[str, Any]]:
        """Put a product into the cart. Gives the cart as it is then."""
        if not self._rows("SELECT id FROM products WHERE id = ?", product_id):
            raise ToolError(f"there is no product {product_id}")
        if not 1 <= quantity <= 100:
            raise ToolError("the quantity must be from 1 to 100")
        self.db.execute(
            "INSERT INTO cart VALUES (?, ?, ?) ON CONFLICT DO UPDATE SET quantity = quantity + excluded.quantity",
            (self.user["id"], product_id, quantity),
        )
        return self._cart()

    @tool
    def empty_cart(self) -> str:
        """Take everything out of the cart."""
        self.db.execute("DELETE FROM cart WHERE user = ?", (self.user["id"],))
        return "The cart is empty."

    @tool
    def place_order(self) -> dict[str, Any]:
        """Order what is in the cart, and pay. Gives the order's id and price."""
        cart = self._cart()
        if not cart:
            raise ToolError("the cart is empty")
        total = sum(line["quantity"] * line["price"] for line in cart)
        short = [line["name"] for line in cart if line["quantity"] > line["stock"]]
        if short:
            raise ToolError(f"there is not enough of {', '.join(short)}")
        if total > self._value("SELECT money FROM users WHERE id = ?", self.user["id"]):
            raise ToolError(f"the customer cannot pay {total}")
        order = self._add_order(self.user["id"], [(line["product"], line["quantity"]) for line in cart])
        self.empty_cart()
        return {"order_id": order, "total": total}

    @tool
    def cancel_order(self, order_id: int) -> str:
        """Cancel an order of the customer that is not shipped yet. The money is paid back."""
        found = self._rows("SELECT status FROM orders WHERE id = ? AND user = ?", order_id, self.user["id"])
        if not found:
            raise ToolError(f"the customer has no order {order_id}")
        if found[0]["status"] != "open":
            raise ToolError(f"order {order_id} is {found[0]['status']}; only open orders can be cancelled")
        for line in self._rows("SELECT * FROM lines WHERE order_id = ?", order_id):
            self._move(self.user["id"], line["product"], -line["quantity"], line["price"])
        self.db.execute("UPDATE orders SET status = 'cancelled' WHERE id = ?", (order_id,))
        return f"Order {order_id} is cancelled."

    # Grading

    def grade(self) -> float:
        """1 when the database is what the errand alone makes of a fresh one."""
        twin = Shop()
        twin.reset(self.seed, self.errand)
        try:
            twin.solve()
            return float(self.state() == twin.state())
        finally:
            twin.close()

    def solve(self) -> None:
        self._play()

    def state(self) -> dict[str, list[dict[str, Any]]]:
        """All that counts, in a fixed order. What is left in a cart does not."""
        return {
            table: self._rows(f"SELECT * FROM {table} ORDER BY 1, 2")
            for table in ("users", "products", "orders", "lines")
        }

    def close(self) -> None:
        self.db.close()

    # The errands: what the agent is asked, and what it should do

    def _buy(self) -> tuple[str, Callable[[], None]]:
        product, quantity = self._cheap(), 2

        def play() -> None:
            self.add_to_cart(product["id"], quantity)
            self.place_order()

        return f"Order {quantity} of {product['name']}.", play

    def _cancel(self) -> tuple[str, Callable[[], None]]:
        order = self.open_order
        names = " and ".join(line["name"] for line in self._lines(order))
        return f"Cancel the open order of {names}.", lambda: _done(self.cancel_order(order))

    def _exchange(self) -> tuple[str, Callable[[], None]]:
        order, product = self.open_order, self._cheap()

        def play() -> None:
            self.cancel_order(order)
            self.add_to_cart(product["id"])
            self.place_order()

        names = " and ".join(line["name"] for line in self._lines(order))
        return f"Exchange the open order of {names}: cancel it, and order one {product['name']} instead.", play

    # The database

    def _fill(self, draw: random.Random) -> None:
        for name in NAMES:
            self.db.execute("INSERT INTO users (name, money) VALUES (?, ?)", (name, draw.randrange(5000, 9000)))
        for name in PRODUCTS:
            row = (name, draw.randrange(200, 900), draw.randrange(20, 40))
            self.db.execute("INSERT INTO products (name, price, stock) VALUES (?, ?, ?)", row)
        self.user = draw.choice(self._rows("SELECT id, name FROM users"))
        for user in range(1, len(NAMES) + 1):
            order = self._add_order(user, [(draw.randrange(1, len(PRODUCTS) + 1), 1)])
            self.db.execute("UPDATE orders SET status = 'shipped' WHERE id = ?", (order,))
        self.open_order = self._add_order(self.user["id"], [(each, 1) for each in draw.sample(range(1, 11), 2)])

    def _cheap(self) -> dict[str, Any]:
        """A product that the customer has not ordered."""
        return self._rows(
            "SELECT * FROM products WHERE id NOT IN (SELECT product FROM lines WHERE order_id = ?) ORDER BY price",
            self.open_order,
        )[0]

    def _lines(self, order: int) -> list[dict[str, Any]]:
        return self._rows(
            "SELECT name FROM lines JOIN products ON products.id = product WHERE order_id = ? ORDER BY name", order
        )

    def _cart(self) -> list[dict[str, Any]]:
        return self._rows(
            "SELECT product, name, quantity, price, stock FROM cart JOIN products ON products.id = product "
            "WHERE user = ? ORDER BY product",
            self.user["id"],
        )

    def _add_order(self, user: int, wanted: list[tuple[int, int]]) -> int:
        order = self.db.execute("INSERT INTO orders (user, status) VALUES (?, 'open')", (user,)).lastrowid
        assert order is not None
        for product, quantity in wanted:
            price = self._value("SELECT price FROM products WHERE id = ?", product)
            self.db.execute("INSERT INTO lines VALUES (?, ?, ?, ?)", (order, product, quantity, price))
            self._move(user, product, quantity, price)
        return order

    def _move(self, user: int, product: int, quantity: int, price: int) -> None:
        """Goods from the shop to the user and money back, or, with a negative quantity, the other way."""
        self.db.execute("UPDATE products SET stock = stock - ? WHERE id = ?", (quantity, product))
        self.db.execute("UPDATE users SET money = money - ? WHERE id = ?", (quantity * price, user))

    def _rows(self, query: str, *values: Any) -> list[dict[str, Any]]:
        return [dict(row) for row in self.db.execute(query, values)]

    def _value(self, query: str, *values: Any) -> int:
        value: int = self.db.execute(query, values).fetchone()[0]
        return value


def _done(_: object) -> None:
    """For an errand that is one call."""


ERRANDS: dict[str, Callable[[Shop], tuple[str, Callable[[], None]]]] = {
    "buy": Shop._buy,
    "cancel": Shop._cancel,
    "exchange": Shop._exchange,
}
