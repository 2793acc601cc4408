// SPDX-License-Identifier: MIT OR Apache-2.0
/* Tests of who sends for a queue pair, when several processors ask for it (src/send.c). What is asked for and sent by nobody ends in a hang. */
#define pr_fmt(fmt) KBUILD_MODNAME ": " fmt
#include <linux/kthread.h>
#include <linux/sched/task.h>

#include "client.h"

/* Messages of each poster, and how many are on their way at most: few, so that all posters wait soon for one that was not sent. */
#define POSTS 5000
#define ON_THEIR_WAY 3
#define POSTERS 2

struct posters {
	struct end *end;
	atomic_t room;
	bool failed;
};

static int poster(void *data)
{
	struct posters *posters = data;
	int i;

	for (i = 0; i < POSTS && !kthread_should_stop(); i++) {
		while (atomic_dec_if_positive(&posters->room) < 0) {
			if (kthread_should_stop())
				return 0;
			cond_resched();
		}
		if (post_send(posters->end, i, 0, 64, 0))
			WRITE_ONCE(posters->failed, true);
	}
	return 0;
}

/* Counts what is complete, and returns a receive for each that was used. */
static int take(struct end *end, int *sent, int *received)
{
	struct ib_wc wc;

	while (ib_poll_cq(end->cq, 1, &wc)) {
		EXPECT(wc.status == IB_WC_SUCCESS);
		if (wc.opcode == IB_WC_RECV) {
			EXPECT(!post_receive(end, 1, 4096, 64));
			++*received;
		} else {
			++*sent;
		}
	}
	return 0;
}

/* Answers each message until all of them have come, and all answers. */
static int answer_all(struct pair *pair, struct posters *posters)
{
	int from_a = 0, at_b = 0, from_b = 0, at_a = 0, answers = 0;
	unsigned long limit = jiffies + PATIENCE;

	while (at_a < POSTERS * POSTS || from_a < POSTERS * POSTS || from_b < POSTERS * POSTS) {
		EXPECT(time_before(jiffies, limit));
		EXPECT(!READ_ONCE(posters->failed));
		EXPECT(!take(&pair->a, &from_a, &at_a));
		EXPECT(!take(&pair->b, &from_b, &at_b));
		for (; answers < at_b; answers++) {
			EXPECT(!post_send(&pair->b, 1, 0, 64, 0));
			atomic_inc(&posters->room);
		}
		cond_resched();
	}
	return 0;
}

/* Two processors post for one queue pair, which receives meanwhile. */
static int posters(struct pair *pair)
{
	struct posters posters = { .end = &pair->a, .room = ATOMIC_INIT(ON_THEIR_WAY) };
	struct task_struct *tasks[POSTERS];
	int i, result;

	for (i = 0; i < 4 * ON_THEIR_WAY; i++) {
		EXPECT(!post_receive(&pair->a, 1, 4096, 64));
		EXPECT(!post_receive(&pair->b, 1, 4096, 64));
	}
	for (i = 0; i < POSTERS; i++) {
		tasks[i] = kthread_create(poster, &posters, "poster/%d", i);
		if (IS_ERR(tasks[i]))
			break;
		get_task_struct(tasks[i]);
		kthread_bind(tasks[i], i % num_online_cpus());
		wake_up_process(tasks[i]);
	}
	result = i < POSTERS ? -ENOMEM : answer_all(pair, &posters);
	while (i--) {
		kthread_stop(tasks[i]);
		put_task_struct(tasks[i]);
	}
	return result;
}

/* Many messages at a time: then the queue counts as crowded, and what their client posts is sent by a work. */
#define MANY 8

/* Sends many messages, takes them with one call of the handler, and answers them. */
static int answer_many(struct pair *pair)
{
	struct end *a = &pair->a, *b = &pair->b;
	int i, calls = atomic_read(&b->calls);

	for (i = 0; i < MANY; i++) {
		EXPECT(!post_receive(a, i, 32768 + i * 64, 64));
		EXPECT(!post_receive(b, i, i * 64, 64));
	}
	memset(b->buffer, 0, MANY * 64);
	memset(a->buffer + 32768, 0, MANY * 64);
	get_random_bytes(a->buffer, MANY * 64);
	EXPECT(!ib_req_notify_cq(b->cq, IB_CQ_NEXT_COMP));
	for (i = 0; i < MANY; i++)
		EXPECT(!post_send(a, i, i * 64, 64, 0));
	for (i = 0; i < MANY; i++)
		EXPECT(!expect(a, i, IB_WC_SEND));
	for (i = 0; atomic_read(&b->calls) == calls && i < 100000; i++)
		usleep_range(100, 200);
	for (i = 0; i < MANY; i++)
		EXPECT(!expect(b, i, IB_WC_RECV));
	for (i = 0; i < MANY; i++)
		EXPECT(!post_send(b, i, i * 64, 64, 0));
	for (i = 0; i < MANY; i++)
		EXPECT(!expect(b, i, IB_WC_SEND));
	for (i = 0; i < MANY; i++)
		EXPECT(!expect(a, i, IB_WC_RECV));
	EXPECT(!memcmp(a->buffer, a->buffer + 32768, MANY * 64));
	return 0;
}

static int crowded(struct pair *pair)
{
	int i;

	for (i = 0; i < 200; i++)
		EXPECT(!answer_many(pair));
	return 0;
}

const struct test sender_tests[] = {
	{ "posters on two processors", posters },
	{ "answers to many messages at a time", crowded },
};

const int sender_test_count = ARRAY_SIZE(sender_tests);
