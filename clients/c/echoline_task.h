/* A task for echoline as a shared library, in any language with a C interface. docs/how-to/write-a-task.md describes
 * how echoline runs it.
 *
 * The library exports one function, echoline_task(), which returns a table of functions. Each process calls them from
 * one thread, one after another; task.options.processes sets the number of processes.
 *
 * - Versions: ECHOLINE_TASK_ABI changes when the meaning of something in this file changes. New fields are only added
 *   at the end of a struct. `size` is the size of the struct in the version that its creator was compiled with.
 * - Texts are UTF-8 with their size, without a NUL at the end; {NULL, 0} is no text. Texts that a function returns
 *   must remain valid and unchanged until the next call.
 * - Errors: a function returns 0 for success. For an error it returns another value and writes the reason into `why`,
 *   as a text of at most ECHOLINE_WHY_BYTES with a NUL at the end. After an error of score() or step(), the rollout
 *   returns to the learner without a reward. It does not count against the policy.
 * - A struct that a function fills arrives with `size` set and all other bytes 0.
 */
#ifndef ECHOLINE_TASK_H
#define ECHOLINE_TASK_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define ECHOLINE_TASK_ABI 1u
#define ECHOLINE_WHY_BYTES 1024u

typedef struct echoline_text {
  const char *data;
  size_t size;
} echoline_text;

/* prompt: required, at most 256 KiB; the others at most 64 KiB. id: at most 128 bytes; absent: made from the row.
 * metadata: JSON. demonstration: an answer to imitate in a warm start; score() and begin() never get it. */
typedef struct echoline_problem {
  size_t size;
  echoline_text id, prompt, reference, metadata, demonstration;
} echoline_problem;

typedef struct echoline_component {
  echoline_text name; /* 1 to 128 bytes */
  double value;       /* finite */
} echoline_component;

enum { ECHOLINE_CORRECT_BY_REWARD = 0, ECHOLINE_CORRECT = 1, ECHOLINE_WRONG = 2 };

typedef struct echoline_score {
  size_t size;
  double reward;                        /* finite */
  int32_t verdict;                      /* ECHOLINE_..., for evaluations; _BY_REWARD: correct if the reward is >= 1 */
  int32_t more;                         /* only of step(); not 0: the policy gets `observation` and answers again */
  echoline_text observation;            /* at most 256 KiB */
  const echoline_component *components; /* for reports, at most 64 */
  size_t component_count;
} echoline_score;

typedef struct echoline_task_table {
  uint32_t abi;            /* ECHOLINE_TASK_ABI */
  uint32_t size;           /* sizeof(echoline_task_table) */
  const char *name;        /* ends with a NUL; at most 128 bytes; NULL: none */
  uint32_t deterministic;  /* not 0: equal inputs give equal scores on every machine and at every time */
  uint32_t reserved;       /* 0 */

  /* open makes a task, which the other functions get; close ends it. settings: task.options.settings of the run file,
   * as JSON. seed: the run's seed. */
  int (*open)(echoline_text settings, uint64_t seed, void **task, char *why);
  void (*close)(void *task);

  /* The training problems (evaluation: 0) or held-out problems (evaluation: 1). A row is always the same problem. */
  uint64_t (*problem_count)(void *task, int evaluation);
  int (*problem)(void *task, int evaluation, uint64_t row, echoline_problem *problem, char *why);

  /* Only for a task with one response; otherwise NULL. */
  int (*score)(void *task, const echoline_problem *problem, echoline_text response, echoline_score *score, char *why);

  /* Only for a task with several turns; otherwise NULL. An episode is one attempt at a problem. It depends only on
   * problem, seed and responses. cut (may be NULL) returns an additional score for the case that another response has
   * no room. It is called after every step with `more` and must not change the episode. destroy is called for every
   * episode that was begun. */
  int (*begin)(void *task, const echoline_problem *problem, uint64_t seed, void **episode, char *why);
  int (*step)(void *episode, echoline_text response, echoline_score *score, char *why);
  int (*cut)(void *episode, echoline_score *score, char *why);
  void (*destroy)(void *episode);
} echoline_task_table;

/* Returns the table, which must remain unchanged; NULL if the library has no table for this ABI. `abi` is the newest
 * that echoline supports. */
#if defined(__GNUC__)
__attribute__((visibility("default")))
#endif
const echoline_task_table *echoline_task(uint32_t abi);

#ifdef __cplusplus
}
#endif

#endif
