// Where a step's time goes: each member of the team counts the processor's cycles by what it does.
#pragma once
#include "pageant.h"

// What the member of this thread does from now on; where no profile is taken, it tests one flag.
class Clock {
  public:
    static bool counting;

    static void enter(PgPhase phase) {
        if (counting) clock.move(phase);
    }
    // A member begins, and hands in what it counted.
    static void begin();
    static void end();

  private:
    void move(PgPhase phase);

    PgPhase phase_ = PG_OTHER;
    uint64_t since_ = 0, spent_[PG_PHASES] = {};
    static thread_local Clock clock;
};
