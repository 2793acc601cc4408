/* Lesson 2: registers memory, and shows which keys and rights a region has.
 *
 * usage: memory */
#include "lesson.h"

static struct ibv_mr *reg(struct ibv_pd *pd, char *start, size_t length, int access)
{
	struct ibv_mr *mr = ibv_reg_mr(pd, start, length, access);

	if (mr)
		printf("  %zu bytes, lkey 0x%08x, rkey 0x%08x\n", mr->length, mr->lkey, mr->rkey);
	else
		printf("  refused: %s\n", strerror(errno));
	return mr;
}

int main(void)
{
	struct ibv_device **list = created(ibv_get_device_list(NULL), "ibv_get_device_list");
	struct ibv_context *context;
	struct ibv_pd *pd;
	struct ibv_mr *first, *second, *third;
	char *buffer = created(calloc(2, 4096), "calloc");

	if (!list[0]) {
		fprintf(stderr, "there are no RDMA devices\n");
		return 1;
	}
	context = created(ibv_open_device(list[0]), "ibv_open_device");
	ibv_free_device_list(list);
	pd = created(ibv_alloc_pd(context), "ibv_alloc_pd");

	printf("for this program only:\n");
	first = reg(pd, buffer, 8192, IBV_ACCESS_LOCAL_WRITE);
	printf("the second half, which peers may also read:\n");
	second = reg(pd, buffer + 4096, 4096, IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_READ);
	printf("the second half once more, which peers may also write:\n");
	third = reg(pd, buffer + 4096, 4096, IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE);
	printf("writable for peers, but not for this program's own requests:\n");
	reg(pd, buffer, 4096, IBV_ACCESS_REMOTE_WRITE);

	printf("free the protection domain before its regions:\n  %s\n",
	       strerror(ibv_dealloc_pd(pd)));
	check(ibv_dereg_mr(third), "ibv_dereg_mr");
	check(ibv_dereg_mr(second), "ibv_dereg_mr");
	check(ibv_dereg_mr(first), "ibv_dereg_mr");
	printf("after its regions:\n  %s\n", strerror(ibv_dealloc_pd(pd)));
	check(ibv_close_device(context), "ibv_close_device");
	free(buffer);
	return 0;
}
