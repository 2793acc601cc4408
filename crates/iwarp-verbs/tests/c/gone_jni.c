/* Lets a Java program run `gone`. */
#include <jni.h>

int gone_main(int count, char **words);

JNIEXPORT jint JNICALL Java_Gone_run(JNIEnv *env, jclass class, jstring face)
{
	const char *name = (*env)->GetStringUTFChars(env, face, NULL);
	char *words[] = { "gone", (char *)name, "runtime", NULL };
	int code = gone_main(3, words);

	(void)class;
	(*env)->ReleaseStringUTFChars(env, face, name);
	return code;
}
