import unittest

from cachebox import LruCache, memoize


class LruTest(unittest.TestCase):
    def test_keeps_what_it_was_given(self) -> None:
        cache = LruCache(2)
        cache.put("a", 1)
        self.assertEqual(cache.get("a"), 1)
        self.assertIsNone(cache.get("b"))

    def test_memoize(self) -> None:
        calls = []

        @memoize(10)
        def double(n: int) -> int:
            calls.append(n)
            return 2 * n

        self.assertEqual([double(2), double(2)], [4, 4])
        self.assertEqual(calls, [2])


if __name__ == "__main__":
    unittest.main()
