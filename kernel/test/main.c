// SPDX-License-Identifier: MIT OR Apache-2.0
/*
 * A kernel module that tests the engine. Loading the module runs all tests; each test uses two
 * connected queue pairs. Loading always fails at the end, so the module never stays loaded.
 *
 * `cargo xtask kernel engine` builds the module, loads it in a virtual machine and reads its
 * output: a line for each test, and a last line with the numbers of tests and failures.
 */
#define pr_fmt(fmt) KBUILD_MODNAME ": " fmt
#include <linux/module.h>
#include <linux/slab.h>
#include <linux/string.h>

#include "test.h"

static const struct test tests[] = {
	{ "memory write", write_in_pieces },
	{ "memory write, CRC", write_in_pieces, .crc = true },
	{ "memory write, CRC, markers", write_in_pieces, .crc = true, .markers = true },
	{ "memory read", read_back },
	{ "memory read, CRC", read_back, .crc = true },
	{ "memory send", send_to_receive },
	{ "memory send, CRC", send_to_receive, .crc = true },
	{ "memory fast registration", fast_registration, .crc = true },
	{ "memory scattered pages", scattered_pages },
	{ "memory scattered pages, CRC", scattered_pages, .crc = true },
	{ "memory page lists", page_lists, .crc = true },
	{ "memory flush in steps", flush_in_steps, .most_completions = 16 },
	{ "memory held Send times out", hold_time_limit, .hold_ms = 300 },
	{ "memory no first FPDU", no_first_fpdu, .first_fpdu_ms = 50 },
	{ "memory stream restart", stream_restart },
	{ "memory write beyond region", write_beyond_region, .crc = true },
	{ "memory wrong CRC", wrong_crc, .crc = true },
	{ "tcp writes", over_tcp_writes, .tcp = true },
	{ "tcp writes, CRC", over_tcp_writes, .tcp = true, .crc = true },
	{ "tcp reads", over_tcp_reads, .tcp = true },
	{ "tcp reads, CRC", over_tcp_reads, .tcp = true, .crc = true },
	{ "tcp ping-pong, CRC", over_tcp_ping_pong, .tcp = true, .crc = true },
	{ "tcp receive posted late, CRC", over_tcp_held, .tcp = true, .crc = true },
	{ "tcp graceful close", over_tcp_end, .tcp = true },
};

static char *only = "";
module_param(only, charp, 0);
MODULE_PARM_DESC(only, "Runs only tests whose name begins with this text");

static int run(const struct test *test)
{
	struct pair *pair = kzalloc(sizeof(*pair), GFP_KERNEL);
	long live = iwarp_live(), before;
	int error;

	if (!pair)
		return -ENOMEM;
	error = pair_create(pair, test);
	before = atomic_long_read(&iwarp_allocations);
	if (!error)
		error = test->run(pair);
	if (!error && atomic_long_read(&iwarp_allocations) != before && !test->markers) {
		pr_err("the engine allocated memory during the test\n");
		error = -EIO;
	}
	pair_free(pair);
	kfree(pair);
	if (!error && iwarp_live() != live) {
		pr_err("%ld allocations were not freed\n", iwarp_live() - live);
		error = -EIO;
	}
	return error;
}

static int __init engine_test_init(void)
{
	static const u8 nine[] = "123456789";
	int i, count = 0, failed = 0;

	if (iwarp_crc32c(0, nine, 9) != 0xe3069283) {
		pr_err("FAILED crc32c: %08x\n", iwarp_crc32c(0, nine, 9));
		failed++;
	}
	for (i = 0; i < ARRAY_SIZE(tests); i++) {
		int error;

		if (strncmp(tests[i].name, only, strlen(only)))
			continue;
		count++;
		error = run(&tests[i]);
		if (error) {
			pr_err("FAILED %s: %d\n", tests[i].name, error);
			failed++;
		} else {
			pr_info("passed %s\n", tests[i].name);
		}
	}
	pr_info("%d tests, %d failed\n", count, failed);
	/* The module is not needed any more. If loading fails, the kernel unloads it. */
	return -EAGAIN;
}
module_init(engine_test_init);

MODULE_LICENSE("Dual MIT/GPL");
MODULE_DESCRIPTION("Test of the iWARP engine in the kernel");
