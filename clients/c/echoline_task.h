/* A task for echoline as a shared library, in any language that can speak C. docs/how-to/write-a-task.md says how it runs.
 *
 * The library exports one function, echoline_task(), which returns a table of what it can do. Echoline calls the functions of the table from one
 * thread, one after another; a library that keeps state elsewhere is run in several processes.
 *
 * - Versions: ECHOLINE_TASK_ABI changes when something here changes its meaning. Fields are only ever added, at the end: `size` says how much of
 *   a struct whoever has made it knew.
 * - Texts are UTF-8, with their size and without a NUL at the end; {NULL, 0} is none. What a function returns has to stay as it is until the next call.
 * - Errors: a function returns 0, or anything else and why, a text that ends with a NUL, in `why` (ECHOLINE_WHY_BYTES of room). An error of
 *   score() or step() gives that rollout back; it earns nothing, and is no fault of the policy.
 * - Structs to be filled come with every byte 0 but `size`.
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

/* prompt: required, at most 256 KiB; the others 64 KiB. id: at most 128 bytes, made from the row where there is none. metadata: JSON. demonstration: an
 * answer worth imitating, for a warm start; never told to score() or begin(). */
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
  int32_t verdict;                      /* what an evaluation counts; ECHOLINE_CORRECT_BY_REWARD: whether the reward is 1 or more */
  int32_t more;                         /* of step(): not 0: the policy is told `observation`, and answers again */
  echoline_text observation;            /* at most 256 KiB */
  const echoline_component *components; /* for reports, at most 64 */
  size_t component_count;
} echoline_score;

typedef struct echoline_task_table {
  uint32_t abi;            /* ECHOLINE_TASK_ABI */
  uint32_t size;           /* sizeof(echoline_task_table) */
  const char *name;        /* ends with a NUL; at most 128 bytes; NULL: none */
  uint32_t deterministic;  /* not 0: the same of the same, wherever and whenever it runs */
  uint32_t reserved;       /* 0 */

  /* settings: task.options.settings of the run file, JSON. seed: of the run. */
  int (*open)(echoline_text settings, uint64_t seed, void **task, char *why);
  void (*close)(void *task);

  /* Problems to train on, and those held out (evaluation: 1). The same row is the same problem, always. */
  uint64_t (*problem_count)(void *task, int evaluation);
  int (*problem)(void *task, int evaluation, uint64_t row, echoline_problem *problem, char *why);

  /* A task of one response; NULL in one of many turns. */
  int (*score)(void *task, const echoline_problem *problem, echoline_text response, echoline_score *score, char *why);

  /* A task of many turns; NULL in one of one response. What happens depends on problem, seed and responses alone. cut (may be NULL): what is due besides
   * where there is no room for another response; asked after every step with `more`, and must change nothing. destroy is called for every
   * episode that was begun. */
  int (*begin)(void *task, const echoline_problem *problem, uint64_t seed, void **episode, char *why);
  int (*step)(void *episode, echoline_text response, echoline_score *score, char *why);
  int (*cut)(void *episode, echoline_score *score, char *why);
  void (*destroy)(void *episode);
} echoline_task_table;

/* The table, which stays as it is, or NULL for an ABI that the library does not have. `abi`: the newest that echoline knows. */
#if defined(__GNUC__)
__attribute__((visibility("default")))
#endif
const echoline_task_table *echoline_task(uint32_t abi);

#ifdef __cplusplus
}
#endif

#endif
