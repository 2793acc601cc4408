/* Creates objects until a limit of the process or of its cgroup is reached.
 *
 * limited cq|qp DEPTH COUNT ERROR [MEMLOCK]
 *
 * Creates COUNT completion queues or queue pairs with DEPTH entries. With MEMLOCK, first limits
 * locked memory to that many bytes and becomes an ordinary user. Exit status: 0 if an object could
 * be created, and a later one failed with ERROR (a number). All objects are then destroyed.
 */
#include "pair.h"
#include <grp.h>
#include <sys/resource.h>

#define MAX_COUNT 4096

static void become_user(unsigned long locked)
{
	struct rlimit limit = { locked, locked };

	fail_if(setrlimit(RLIMIT_MEMLOCK, &limit), "the limit of locked memory");
	fail_if(setgroups(0, NULL) || setgid(1000) || setuid(1000), "another user");
}

static struct ibv_context *open_device(void)
{
	struct ibv_device **list = ibv_get_device_list(NULL);
	struct ibv_context *context;

	fail_if(!list || !list[0], "a device");
	context = ibv_open_device(list[0]);
	fail_if(!context, "opening the device");
	return context;
}

static struct ibv_qp *create_qp(struct ibv_pd *pd, struct ibv_cq *cq, int depth)
{
	struct ibv_qp_init_attr attr = {
		.send_cq = cq, .recv_cq = cq, .qp_type = IBV_QPT_RC,
		.cap = { (uint32_t)depth, (uint32_t)depth, 1, 1, 0 },
	};

	return ibv_create_qp(pd, &attr);
}

int main(int argc, char **argv)
{
	static void *objects[MAX_COUNT];
	int pairs, depth, count, wanted, made = 0, error = 0;
	struct ibv_context *context;
	struct ibv_cq *cq;
	struct ibv_pd *pd;

	if (argc < 5 || atoi(argv[3]) > MAX_COUNT) {
		fprintf(stderr, "usage: limited cq|qp DEPTH COUNT ERROR [MEMLOCK]\n");
		return 2;
	}
	pairs = !strcmp(argv[1], "qp");
	depth = atoi(argv[2]);
	count = atoi(argv[3]);
	wanted = atoi(argv[4]);
	if (argc > 5)
		become_user(strtoul(argv[5], NULL, 0));
	context = open_device();
	pd = ibv_alloc_pd(context);
	cq = ibv_create_cq(context, 16, NULL, NULL, 0);
	fail_if(!pd || !cq, "a protection domain and a small completion queue");
	while (made < count) {
		errno = 0;
		objects[made] = pairs ? (void *)create_qp(pd, cq, depth) :
			(void *)ibv_create_cq(context, depth, NULL, NULL, 0);
		error = errno;
		if (!objects[made])
			break;
		made++;
	}
	printf("%d objects, then error %d\n", made, error);
	fflush(stdout);
	if (getenv("HOLD"))
		sleep(atoi(getenv("HOLD")));
	for (int i = 0; i < made; i++)
		fail_if(pairs ? ibv_destroy_qp(objects[i]) : ibv_destroy_cq(objects[i]),
			"destroying an object");
	fail_if(ibv_destroy_cq(cq) || ibv_dealloc_pd(pd) || ibv_close_device(context),
		"closing the device");
	return !(made > 0 && made < count && error == wanted);
}
