"""The what-if simulator: the core's own programs, run in virtual time (integer nanoseconds).

    scenario   TOML file or preset + overrides -> a checked `Scenario`
    workload   what arrives, when, and how long it is       (arrivals: when; trace*: from files; prompts: what is
                                                             alike)
    costs      what each operation takes                    (hardware: models and devices for the roofline)
    engine     SimPy process that runs the core's programs
    run        one scenario -> summary and timeline
    sweep      many scenarios -> rows                       (design: which; results: the file that keeps them)
    capacity   service levels -> the highest rate           (rates: the same scenario at another rate)
    profile    what an engine's operations were measured to take  (measured: prices and lanes by it; subject: of
                                                             which model and device)
    calibrate  recorded runs -> a profile                   (compute_fit, fitting: how)
    predict    a recorded run -> the same run, simulated; or its decisions, replayed
    validate   both side by side: errors, intervals, the first decision that differs
    advise     a scenario -> which depth pays, and from which host cost on

May import asyncsched, simpy, numpy, pydantic and joblib; never torch.
"""
