import os

import litellm

litellm.suppress_debug_info = True  # it prints advice

answer = litellm.completion(
    model=f"openai/{os.environ['MODEL']}",
    api_base=os.environ["BASE_URL"],
    api_key="none",
    messages=[{"role": "user", "content": os.environ["PROMPT"]}],
    temperature=0,
    max_tokens=16,
)
try:
    litellm.completion(
        model=f"openai/{os.environ['MODEL']}",
        api_base=os.environ["BASE_URL"],
        api_key="none",
        messages=[{"role": "user", "content": "long " * 20_000}],
    )
except litellm.ContextWindowExceededError:
    print(answer.choices[0].message.content)
