"""From sensitivity to a guarantee: exact (epsilon, delta), zCDP, calibration, composition."""

from dpftrl.accounting.amplification import (
    SampledGuarantee,
    account_sampled,
    calibrate_sampled,
)
from dpftrl.accounting.composition import Spent, compose, dp_event, spending
from dpftrl.accounting.gaussian import (
    delta_of,
    epsilon_of,
    log_delta_of,
    mu_of,
    rho_of,
    sampler_delta,
)
from dpftrl.accounting.guarantee import (
    Guarantee,
    Hypothesis,
    Run,
    account,
    calibrate,
    calibrate_rho,
    delta_for,
    guarantee_of,
)
from dpftrl.accounting.guarantee_files import load_guarantee, save_guarantee
from dpftrl.accounting.risk import Risk, calibrate_risk, risk_of

__all__ = [
    "Guarantee",
    "Hypothesis",
    "Risk",
    "Run",
    "SampledGuarantee",
    "Spent",
    "account",
    "account_sampled",
    "calibrate",
    "calibrate_rho",
    "calibrate_risk",
    "calibrate_sampled",
    "compose",
    "delta_for",
    "delta_of",
    "dp_event",
    "epsilon_of",
    "guarantee_of",
    "load_guarantee",
    "log_delta_of",
    "mu_of",
    "rho_of",
    "risk_of",
    "sampler_delta",
    "save_guarantee",
    "spending",
]
