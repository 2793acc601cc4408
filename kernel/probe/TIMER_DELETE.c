// SPDX-License-Identifier: MIT OR Apache-2.0
/* timer_delete_sync() and timer_shutdown_sync(), which replace del_timer_sync(). */
#include <linux/timer.h>

static inline void probe(struct timer_list *timer)
{
	timer_delete_sync(timer);
	timer_shutdown_sync(timer);
}
