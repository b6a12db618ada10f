"""From what a training is told to a plan: mechanism, noise and guarantee."""

from dpftrl.accounting import account, calibrate
from dpftrl.engines.local.sections import Privacy
from dpftrl.errors import InvalidInput
from dpftrl.mechanisms import Mechanism, load_mechanism, mechanism
from dpftrl.optimize import optimize_blt
from dpftrl.participation import UNCAPPED, MinSep
from dpftrl.plan import Fleet, Plan

# Of a BLT, if nobody says otherwise; in a training of fewer rounds, one for each.
BUFFERS = 4


def make_plan(privacy: Privacy, population: int) -> Plan:
    """The plan for a number of clients; only a plan can train."""
    fleet = Fleet(
        population,
        privacy.report_goal,
        availability=privacy.availability,
        over_selection=privacy.over_selection,
    )
    clients = MinSep(
        privacy.rounds,
        fleet.min_sep() if privacy.min_sep is None else privacy.min_sep,
        UNCAPPED if privacy.max_participations is None else privacy.max_participations,
    )
    if (privacy.epsilon is None) == (privacy.noise_multiplier is None):
        raise InvalidInput("[privacy] takes epsilon or noise_multiplier: give one of them")
    chosen = _mechanism(privacy, clients)
    sigma = privacy.noise_multiplier
    if sigma is None:
        sigma = calibrate(chosen, clients, privacy.epsilon or 0.0, privacy.delta)
    return Plan(fleet, account(chosen, clients, sigma, privacy.delta))


def _mechanism(privacy: Privacy, clients: MinSep) -> Mechanism:
    if privacy.mechanism == "blt":
        buffers = privacy.buffers or min(BUFFERS, clients.rounds)
        return optimize_blt(clients, buffers, objective="rms").mechanism
    if privacy.mechanism.endswith(".json"):
        return load_mechanism(privacy.mechanism)
    return mechanism(privacy.mechanism, clients)
