"""Prices of bytes and of time: what the mixes of a rank's layers take at least, whatever they are.

Belongs here: the bound, and its best prices. What is searched with it is in rank_choice.py.

It is the Lagrangian dual of a rank's choice. At each moment and place of a step a byte has a price, and a layer pays
for what it holds there. A pass takes as long as the longest of what the device computes, the host launches and the bus
moves, and so no less than any average of the three: each has a share. At whatever prices and shares, no mix that fits
takes less than the cheapest ways of all layers, less the price of the room. The best prices are those at which this is
most. Several moments may have one: in one of them one stage holds most, in another one another stage.

The best prices are at a corner, which Newton's method does not reach. So they are sought from inside: of each layer all
ways count, cheap ones more, as exp(-cost / heat) does, and prices are kept from zero by heat times their logarithms.
With less and less heat the corner comes near. Wherever that ends, what is found is a bound.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from .stage_mixes import Stage

MOMENTS = 128  # and places, that have a price
COOLING = 0.1  # of the heat, from one level to the next
LEVELS = 6
WARM, SMALL = 2, 5  # from that level on prices stay that are so often the heat
RIDGE = 1e-9
TRIES = 20  # of Newton's method in a level
ROUNDED = 1e-12  # of what is summed: more than sums are rounded by


class Bound(NamedTuple):
    """Mixes that fit take at least `seconds`, and what their stages are above their `least`.

    least: of each stage, seconds and the price of its bytes. bytes: the price of one in each moment. above: by how much
    each way of each layer, (ways, layers), is above the layer's cheapest, of the stages one after the other; far for
    one that does not fit whatever other layers have. A mix of a stage is no less above than its layers together.
    """

    seconds: float
    least: np.ndarray
    bytes: np.ndarray
    above: np.ndarray


class Prices:
    """What the ways of a rank's layers hold in each moment and place, and take.

    flights: microbatches of each stage that wait, (moments, stages). columns: the stage that is in its backward, or -1.
    fixed: bytes beside the layers'.
    """

    def __init__(self, stages: Sequence[Stage], flights: np.ndarray, columns: np.ndarray, fixed: np.ndarray) -> None:
        self.fixed, held, moments, least = fixed, [], [], []
        for moment, (flight, column) in enumerate(zip(flights, columns.tolist(), strict=True)):
            for place in range(stages[column].n if column >= 0 else 1):
                each = [stage.kept * number for stage, number in zip(stages, flight, strict=True)]
                if column >= 0:  # layers behind the place have freed what this microbatch kept
                    stage, own = stages[column], each[column]
                    own[:, place + 1 :] -= stage.kept[:, place + 1 :]
                    own[:, max(0, place - 1) : place + 1] += stage.moved[:, max(0, place - 1) : place + 1]
                    own[:, place] += stage.need[:, place]
                held.append(np.concatenate([part - part.min(0) for part in each], 1))
                least.append([part.min(0).sum() for part in each])
                least[-1][column] -= stages[column].before * (column >= 0)
                moments.append(moment)
        self.held = np.array(held)  # (moments and places, ways, layers), in bytes above the way that holds least
        self.least = np.array(least)  # of each stage, (moments and places, stages)
        self.moments = np.array(moments)
        self.full = fixed[self.moments] + self.least.sum(1)
        self.seconds = np.concatenate([stage.seconds.sum(-1) for stage in stages], 1)
        self.device = np.array([stage.time.device("F") + stage.time.device("B") for stage in stages])
        self.of = np.repeat(np.arange(len(stages)), [stage.n for stage in stages])
        self.far = 10 * sum(stage.slowest for stage in stages)
        # by how much launching and moving take longer than the device, in the forward and in the backward of each stage
        longer, beside = np.zeros((len(stages), 4, *self.seconds.shape)), np.zeros((len(stages), 4))
        for at, stage in enumerate(stages):
            moving, host = stage.moved / stage.bus, stage.time.host
            forward, backward = np.moveaxis(-stage.seconds, 2, 0)
            longer[at][..., self.of == at] = forward, forward + moving, backward, backward + moving
            beside[at] = host["F"], 0.0, host["I"] + host["W"], host["W"]
            beside[at] -= np.repeat([stage.time.device("F"), stage.time.device("B")], 2)
        may = (beside + longer.max(2).sum(2) > 0).ravel()  # be the longest
        self.longer, self.beside = longer.reshape(-1, *self.seconds.shape)[may], beside.ravel()[may]
        self.passes = (np.arange(len(may)) // 2)[may]

    def bound(self, room: float, mixes: Sequence[np.ndarray]) -> Bound:
        """The highest bound of what fits into so many bytes. The moments and places in which these mixes, one of each
        stage, need most have prices."""
        left, chosen = room - self.full, np.concatenate(mixes)
        impossible = (self.held > left[:, None, None] + ROUNDED * room).any(0)
        needs = self.held[:, chosen, np.arange(len(chosen))].sum(1) - left
        needs[self.held.max(1).sum(1) <= left] = -np.inf  # nothing needs more there
        first = np.argsort(-needs, kind="stable")[: min(MOMENTS, int(np.isfinite(needs).sum()))]
        unit = self.held[first].max(1).sum(1) + 1.0
        rows = np.concatenate([self.held[first] / unit[:, None, None], self.longer])
        gains = np.concatenate([-left[first] / unit, self.beside])
        cost, whole = np.where(impossible, np.inf, self.seconds), float(self.device.sum() + self.seconds.max(0).sum())
        begin = np.repeat([whole / max(1, len(first)), 0.25], [len(first), len(self.passes)])
        passes = np.pad(1.0 * (np.unique(self.passes)[:, None] == self.passes), ((0, 0), (len(first), 0)))
        prices = _highest(cost, rows, gains, passes, begin, whole / cost.shape[1])
        priced = cost + np.tensordot(prices, rows, 1)
        paid, shares = prices[: len(first)] / unit, prices[len(first) :]
        least = self.device + paid @ self.least[first]
        least += np.bincount(self.of, priced.min(0)) + np.bincount(self.passes // 2, shares * self.beside, len(least))
        per_byte = np.bincount(self.moments[first], paid, len(self.fixed))
        seconds = least.sum() - per_byte @ (room - self.fixed)
        seconds -= ROUNDED * (abs(least).sum() + per_byte @ (abs(self.fixed) + abs(room)))
        return Bound(float(seconds), least, per_byte, np.minimum(priced - priced.min(0), self.far))


def _highest(
    cost: np.ndarray, rows: np.ndarray, gains: np.ndarray, passes: np.ndarray, prices: np.ndarray, heat: float
) -> np.ndarray:
    """The prices at which prices @ gains and the least of cost + prices @ rows, (ways, layers), of each layer are most
    together. No price is below zero, and no sum of passes @ prices above one. prices: to begin with. heat: too."""

    def priced(prices: np.ndarray) -> np.ndarray:
        return cost + np.tensordot(prices, rows, 1)

    def warm(prices: np.ndarray) -> tuple[float, np.ndarray, np.ndarray]:
        """(the sum with heat, how much each way counts, what is left of the passes)"""
        each, left = priced(prices), 1 - passes @ prices
        least = each.min(0)
        counts = np.exp((least - each) / heat)
        whole = counts.sum(0)
        logs = np.log(prices).sum() + np.log(left).sum() - np.log(whole).sum()
        return float(prices @ gains + least.sum() + heat * logs), counts / whole, left

    best, at = np.zeros(len(prices)), np.arange(len(prices))
    most = priced(best).min(0).sum()
    for level in range(LEVELS):
        value, counts, left = warm(prices)
        for _ in range(TRIES):
            weighed = rows * counts
            mean = weighed.sum(1)
            slope = gains + mean.sum(1) + heat * (1 / prices - (1 / left) @ passes)
            spread = np.tensordot(weighed, rows, ((1, 2), (1, 2))) - mean @ mean.T
            bend = spread / heat + heat * (np.diag(prices**-2) + (passes.T / left**2) @ passes)
            bend.flat[:: len(bend) + 1] *= 1 + RIDGE  # of moments that are alike
            step = np.linalg.solve(bend, slope)
            gain, falls = float(slope @ step), np.concatenate([[0.0], -step / prices, passes @ step / left]).max()
            share = min(1.0, 0.95 / falls) if falls else 1.0
            while share > 1e-6 and (tried := warm(prices + share * step))[0] < value + 0.1 * share * gain:
                share /= 2
            if share <= 1e-6:
                break
            prices, (value, counts, left) = prices + share * step, tried
            if gain <= heat / 2:
                break
        if (found := float(prices @ gains + priced(prices).min(0).sum())) > most:
            best, most = np.zeros(len(best)), found
            best[at] = prices
        if level >= WARM:  # moments that are far from full have no price
            stay = prices > SMALL * heat
            at, prices, rows, gains, passes = at[stay], prices[stay], rows[stay], gains[stay], passes[:, stay]
        heat *= COOLING
    return best
