"""Rewards vowels, so that the responses of a model with random weights differ in what they are worth."""
import echoline_task as task


def problem(number):
    return {"prompt": f"write about {number}: ", "reference": ""}


@task.score
def score(problem, response):
    return sum(c in "aeiouAEIOU" for c in response) / (len(response) + 1)


task.run(name="vowels", problems=[problem(n) for n in range(256, 4096)], evaluation=[problem(n) for n in range(256)])
