import unittest

from cachebox import LruCache, memoize


def filled(capacity: int, *keys: str) -> LruCache:
    cache = LruCache(capacity)
    for key in keys:
        cache.put(key, key.upper())
    return cache


class Eviction(unittest.TestCase):
    def test_the_oldest_goes(self) -> None:
        cache = filled(2, "a", "b", "c")
        self.assertEqual([key for key in "abc" if key in cache], ["b", "c"])

    def test_reading_is_a_use(self) -> None:
        cache = filled(2, "a", "b")
        cache.get("a")
        cache.put("c", 3)
        self.assertEqual([key for key in "abc" if key in cache], ["a", "c"])

    def test_writing_again_is_a_use_and_evicts_nothing(self) -> None:
        cache = filled(2, "a", "b")
        cache.put("a", 1)
        self.assertEqual(len(cache), 2)
        cache.put("c", 3)
        self.assertEqual([key for key in "abc" if key in cache], ["a", "c"])
        self.assertEqual(cache.get("a"), 1)

    def test_asking_is_no_use(self) -> None:
        cache = filled(2, "a", "b")
        self.assertIn("a", cache)
        cache.put("c", 3)
        self.assertNotIn("a", cache)
        self.assertEqual((cache.hits, cache.misses), (0, 0))


class Values(unittest.TestCase):
    def test_values_that_are_false_are_found(self) -> None:
        cache = LruCache(5)
        for key, value in [("none", None), ("zero", 0), ("empty", "")]:
            cache.put(key, value)
            self.assertEqual(cache.get(key, "default"), value)
        self.assertEqual((cache.hits, cache.misses), (3, 0))

    def test_misses_are_counted_and_give_the_default(self) -> None:
        cache = LruCache(1)
        self.assertEqual(cache.get("x", 7), 7)
        self.assertEqual((cache.hits, cache.misses), (0, 1))
        self.assertEqual(len(cache), 0)

    def test_memoize_remembers_false_results(self) -> None:
        calls = []

        @memoize(2)
        def nothing(n: int) -> None:
            calls.append(n)

        nothing(1)
        nothing(1)
        self.assertEqual(calls, [1])


class Capacity(unittest.TestCase):
    def test_below_one_is_refused(self) -> None:
        for capacity in (0, -1):
            with self.assertRaises(ValueError):
                LruCache(capacity)
